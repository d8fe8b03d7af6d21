"""The papers' tables with our numbers beside theirs, and the results of a study as they are published."""
