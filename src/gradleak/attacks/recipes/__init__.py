"""Attacks of the papers: each file picks parts and numbers and cites them."""
