"""Policies change ops of the whole process where torch has no flag, and can be reverted."""
