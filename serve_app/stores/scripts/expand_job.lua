-- args: job_id, parts:number, first, fields:list
-- expand_job: give a completed job its whole record again, `fields` and values by turns, if it is still the compact one whose first
-- part is `first`, of so many; it is compacted again later. Running it twice changes nothing.
local name = K('job:' .. job_id)
if redis.call('HGET', name, '0') ~= first then return end
for number = 0, parts - 1 do redis.call('HDEL', name, number) end
redis.call('HDEL', name, 'a', 'k')
redis.call('HSET', name, unpack(fields))
redis.call('ZADD', K('uncompacted'), now, job_id)
