"""Handlers that the tests register; found by the package's autodiscovery."""
