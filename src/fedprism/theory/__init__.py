"""Checks of the theory behind the methods: pure functions over worlds with known answers."""
