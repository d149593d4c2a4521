"""Running a command several times to find out whether its runs are the same."""
