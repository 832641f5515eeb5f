-- args: age_ms:number, limit:number
-- due_jobs: {id, record} of completed jobs that ended so long ago and are not yet compact, the oldest first.
local found = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', K('uncompacted'), '-inf', now - age_ms, 'LIMIT', 0, limit)) do
  found[#found + 1] = {id, redis.call('HGETALL', K('job:' .. id))}
end
return found
