"""The one gradient-matching loop and its parts."""
