"""What is asked: the job, its readers, the pipeline that it requests, and what cannot be.  Pure Python."""
