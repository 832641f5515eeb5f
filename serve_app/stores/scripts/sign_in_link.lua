-- include sign_in_fence
-- args: name, holder, use:flag
-- sign_in_link: a link that is good still, and with `use` for the last time. Returns {purpose, id, fence} or {}.
local purpose, rest = string.match(redis.call('GET', K(name)) or '', '^([^:]+):(.+)$')
if not purpose then return {} end
local id, fence = string.match(rest, '^(.+):(%d+%.%d+)$')
if not id then id, fence = rest, '0.0' end -- made by an older version
local is_good = fence == sign_in_fence(holder .. ':' .. id)
if use or not is_good then redis.call('DEL', K(name)) end
return is_good and {purpose, id, fence} or {}
