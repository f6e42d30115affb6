"""Engines carry asks to phases and replies back; they know no method."""
