"""Host reads of device state in a running engine, observed from outside: the engine is not asked to take part."""
