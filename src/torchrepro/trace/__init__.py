"""Records a run op by op, stores the recording as a trace, and reads traces."""
