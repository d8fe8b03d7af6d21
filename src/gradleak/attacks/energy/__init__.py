"""Our own search: sentences whose layer inputs explain the whole of what was seen."""
