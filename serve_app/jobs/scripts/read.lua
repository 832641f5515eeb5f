-- include record
-- args: job_id
-- read: a record with what an estimate needs, whoever's job it is; writes nothing.
return snapshot(read_record(job_id))
