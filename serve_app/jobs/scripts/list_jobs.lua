-- args: account, state, adapter, key_id, since:number, until_ms:number, after_ms:number, after_id, limit:number, most:number
-- list_jobs: an account's jobs, newest first, that are in a state, use an adapter, were asked for with a key ('' takes any; '-': without one), and
-- were accepted from `since` and before `until_ms`. It begins after a position (time and id), looks at `most` records, finds at
-- most `limit`.
-- Returns {{id, time} of each, {id, time} of the last record looked at, or {} when there are no more}.
local SAME_MS = 32 -- an accept takes the server at least 50 µs, so an account has no more jobs of one millisecond than this

local NO_KEY = '-'

local index = K('jobs:' .. account)
local latest = until_ms and '(' .. until_ms or '+inf'
if after_ms and not (until_ms and until_ms <= after_ms) then latest = after_ms end
local asked = most + SAME_MS
local rows = redis.call('ZREVRANGEBYSCORE', index, latest, since or '-inf', 'WITHSCORES', 'LIMIT', 0, asked)

local function is_wanted(id)
  local job = redis.call('HMGET', K('job:' .. id), 'state', 'adapter', 'key')
  if not job[1] then return false end -- its retention is over
  return (state == '' or job[1] == state) and (adapter == '' or job[2] == adapter) and (key_id == '' or (job[3] or NO_KEY) == key_id)
end

local found, last = {}, {}
for i = 1, #rows, 2 do
  local id, ms = rows[i], tonumber(rows[i + 1])
  if not after_ms or ms < after_ms or (ms == after_ms and id < after_id) then
    if is_wanted(id) then found[#found + 1] = {id, rows[i + 1]} end
    if #found == limit then return {found, {id, rows[i + 1]}} end
  end
  last = {id, rows[i + 1]}
end
if #rows < 2 * asked then last = {} end
return {found, last}
