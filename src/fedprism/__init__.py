"""Federated learning over clients whose data are mixtures of tasks."""
