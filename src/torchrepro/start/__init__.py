"""Start processes under a profile that their parent process has resolved."""
