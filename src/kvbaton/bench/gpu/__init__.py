"""``kvbaton bench gpu``: copies between the memory of two processes, on one GPU or two, beside others."""
