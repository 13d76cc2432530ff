"""Figures, tables and a page, drawn from stored results alone."""
