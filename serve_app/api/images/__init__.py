"""Pictures that an account uploads: sent, read and deleted, with either credential, in the jobs document."""
