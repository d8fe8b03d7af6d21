"""What an audit leaves behind. Standard library and numpy only, so that a report needs no torch."""
