"""The soak: real processes at full load, a random fault every second, and a supervisor that counts."""
