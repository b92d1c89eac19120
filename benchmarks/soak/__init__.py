"""Soaks: random arrivals and device delays, every request's tokens held to stock's."""
