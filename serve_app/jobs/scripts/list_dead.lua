-- args: account, code, since:number, after_ms:number, after_id, limit:number, most:number
-- list_dead: failed jobs for the operator, newest first, that failed from `since`, are of an account and failed for a code ('' takes
-- any). The list begins after a position (time and id), finds at most `limit` and looks at `most` records; the counts by code are of
-- the newest `most` of the time, whatever the position.
-- Returns {{code, jobs, ...}, {{id, time} of each}, {id, time} of the last record looked at, or {} when there are no more}.
local dead = K('dead')

local function read(id)
  local job = redis.call('HMGET', K('job:' .. id), 'account', 'code')
  if not job[1] or (account ~= '' and job[1] ~= account) then return nil end
  return job[2] or ''
end

local counts, order = {}, {}
for _, id in ipairs(redis.call('ZREVRANGEBYSCORE', dead, '+inf', since or '-inf', 'LIMIT', 0, most)) do
  local failed = read(id)
  if failed then
    if not counts[failed] then order[#order + 1] = failed end
    counts[failed] = (counts[failed] or 0) + 1
  end
end
local counted = {}
for _, each in ipairs(order) do
  counted[#counted + 1] = each
  counted[#counted + 1] = counts[each]
end

local rows = redis.call('ZREVRANGEBYSCORE', dead, after_ms or '+inf', since or '-inf', 'WITHSCORES', 'LIMIT', 0, most)
local found, last = {}, {}
for i = 1, #rows, 2 do
  local id, ms = rows[i], tonumber(rows[i + 1])
  if not after_ms or ms < after_ms or (ms == after_ms and id < after_id) then
    local failed = read(id)
    if failed and (code == '' or failed == code) then found[#found + 1] = {id, rows[i + 1]} end
    if #found == limit then return {counted, found, {id, rows[i + 1]}} end
  end
  last = {id, rows[i + 1]}
end
if #rows < 2 * most then last = {} end
return {counted, found, last}
