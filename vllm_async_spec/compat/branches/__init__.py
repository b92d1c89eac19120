"""Which lines and branches of a builder the batches reached, and which unreached lines could make the host wait."""
