-- args: job_ids:list
-- ended: which of these jobs have ended or are gone; writes nothing.
local ended = {}
for _, id in ipairs(job_ids) do
  local state = redis.call('HGET', K('job:' .. id), 'state')
  if state ~= 'queued' and state ~= 'running' then ended[#ended + 1] = id end
end
return ended
