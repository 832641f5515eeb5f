-- include page
-- args: account, code
-- list_dead: failed jobs for the operator, newest first, that failed from `since`, are of an account and failed for a
-- code ('' takes any). A page looks at `most` records; the counts by code are of the newest `most` of the time,
-- whatever the position.
-- Returns {{code, jobs, ...}, {{id, time} of each}, {id, time} of the last record looked at, or {} when there are no
-- more}.
local dead = K('dead')

local function read(id)
  local job = redis.call('HMGET', K('job:' .. id), 'account', 'code')
  if not job[1] or (account ~= '' and job[1] ~= account) then return nil end
  return job[2] or ''
end

local counted, place = {}, {}
for _, id in ipairs(redis.call('ZREVRANGEBYSCORE', dead, '+inf', since or '-inf', 'LIMIT', 0, most)) do
  local failed = read(id)
  if failed then
    if not place[failed] then
      counted[#counted + 1] = failed
      place[failed] = #counted + 1
    end
    counted[place[failed]] = (counted[place[failed]] or 0) + 1
  end
end

local found, last = page(dead, after_ms or '+inf', most, function(id)
  local failed = read(id)
  return failed and (code == '' or failed == code)
end)
return {counted, found, last}
