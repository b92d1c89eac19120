"""Soaks: random arrivals and device delays, with every request's tokens compared with stock's."""
