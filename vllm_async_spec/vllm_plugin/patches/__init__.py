"""What each patch changes in vLLM: a module for a family of patches, named as its TOMLs in patches/ begin."""
