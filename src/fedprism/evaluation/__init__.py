"""Scoring, tables, figures and reports."""
