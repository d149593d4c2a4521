"""Reports the outcome of each setting, and reads the state of the process."""
