"""Pages for browsers: the console, the operators' pages and the reference share one site."""
