"""The papers' tables with our numbers beside theirs, and results of studies for publication."""
