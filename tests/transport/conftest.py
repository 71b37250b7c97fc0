"""That it is here makes the helpers of this folder importable for the tests of the folders below."""
