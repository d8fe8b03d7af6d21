"""A run as one page: put together, and written as HTML, PDF, Markdown and JSON."""
