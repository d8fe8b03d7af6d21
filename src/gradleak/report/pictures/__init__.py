"""Maps, trade-offs and curves as SVG."""
