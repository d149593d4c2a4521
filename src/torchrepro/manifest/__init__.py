"""What a run was: everything that decides its numbers, written down so that no secret leaves."""
