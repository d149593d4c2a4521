"""Write a new pack of profiles, ready to publish."""
