"""Audit a running engine from outside: find its host reads of device state without changing the engine."""
