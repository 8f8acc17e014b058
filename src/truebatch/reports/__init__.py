"""Reports: HTML pages, tables, plots and progress display."""
