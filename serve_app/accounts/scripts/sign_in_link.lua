-- include credential_version
-- args: name, use:flag
-- sign_in_link: read a link if it is still valid; with `use`, delete it. Returns {account or operator, user, credential
-- version, purpose} or {}.
local purpose, holder, version = string.match(redis.call('GET', K(name)) or '', '^([^:]+):(.+):(%d+%.%d+)$')
if not purpose then return {} end
local is_good = version == credential_version_of(holder)
if use or not is_good then redis.call('DEL', K(name)) end
local id, user = string.match(holder, '^%a+:([^:]+):?(.*)$')
return is_good and {id, user, version, purpose} or {}
