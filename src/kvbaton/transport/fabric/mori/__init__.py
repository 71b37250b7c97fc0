"""MORI-IO as a fabric: the adapter, its engine and settings, what it holds of peers, what would end the process."""
