-- include credential_version
-- args: name, holder, use:flag
-- sign_in_link: a link that is good still, and with `use` for the last time. Returns {purpose, id, credential version} or {}.
local purpose, rest = string.match(redis.call('GET', K(name)) or '', '^([^:]+):(.+)$')
if not purpose then return {} end
local id, credential_version = string.match(rest, '^(.+):(%d+%.%d+)$')
if not id then id, credential_version = rest, '0.0' end -- made by an older version
local is_good = credential_version == credential_version_of(holder .. ':' .. id)
if use or not is_good then redis.call('DEL', K(name)) end
return is_good and {purpose, id, credential_version} or {}
