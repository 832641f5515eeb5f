-- include page
-- args: account, state, kind, adapter, key_id, until_ms:number
-- list_jobs: an account's jobs, newest first, that are in a state, are of a kind, use an adapter, were asked for with a
-- key ('' takes any; '-': without one), and were accepted from `since` and before `until_ms`; at most `most` are read.
-- Returns {{id, time} of each, {id, time} of the last record looked at, or {} when there are no more}.
local NO_KEY = '-'

local function is_line_of(line, text) return text and string.find('\n' .. text .. '\n', '\n' .. line .. '\n', 1, true) end

local latest = until_ms and '(' .. until_ms or '+inf'
if after_ms and not (until_ms and until_ms <= after_ms) then latest = after_ms end
local function is_of_kind(id) return kind == '' or (string.sub(id, 1, 3) == 'up_') == (kind == 'upscale') end

local found, last = page(K('jobs:' .. account), latest, most + SAME_MS, function(id)
  if not is_of_kind(id) then return false end
  local job = redis.call('HMGET', K('job:' .. id), 'state', 'adapter', 'key', 'more_adapters')
  if not job[1] then return false end -- its retention is over
  return (state == '' or job[1] == state) and (adapter == '' or job[2] == adapter or is_line_of(adapter, job[4]))
    and (key_id == '' or (job[3] or NO_KEY) == key_id)
end)
return {found, last}
