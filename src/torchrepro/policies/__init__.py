"""What flags cannot do: policies that change ops for the whole process, and their undo."""
