"""Many settings: a grid of audits written as YAML, one record a cell."""
