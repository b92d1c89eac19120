"""The patches' code: one module per family of patches. Its TOMLs in patches/ begin with the module's name."""
