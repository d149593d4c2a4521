"""What a run computed, op by op: recorded, stored, read again."""
