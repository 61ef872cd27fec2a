"""Reports: the same tables on a terminal, in Markdown, and what machines read in JSON."""
