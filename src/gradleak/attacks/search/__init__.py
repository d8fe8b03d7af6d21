"""What all searches share: rows and hypotheses, passes, the search over words, the prior."""
