-- include queue
-- read: a record as the house itself reads it; writes nothing. ARGV: job id
return snapshot(ARGV[1])
