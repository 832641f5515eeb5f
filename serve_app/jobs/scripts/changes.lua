-- args: known:list
-- changes: which of these jobs have changed since the last look; writes nothing. `known` has each id and the text
-- that this script last told of it: its state (none for a job that is gone), attempt, progress and how often its
-- previews were stored. The previews of a changed job are returned if they were stored since then.
local changed = {}
for i = 1, #known, 2 do
  local id, was = known[i], known[i + 1]
  local job = redis.call('HMGET', K('job:' .. id), 'state', 'attempt', 'progress')
  local stored = redis.call('HGET', K('preview:' .. id), 'stored') or '0'
  local is = table.concat({job[1] or '', job[2] or '0', job[3] or '0', stored}, ' ')
  if is ~= was then
    local previews = stored == string.match(was, '%d+$') and {} or redis.call('HGETALL', K('preview:' .. id))
    changed[#changed + 1] = {id, is, previews}
  end
end
return changed
