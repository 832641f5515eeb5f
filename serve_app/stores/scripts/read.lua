-- include queue
-- read: a poll in one round trip; writes nothing. ARGV: job id
return snapshot(ARGV[1])
