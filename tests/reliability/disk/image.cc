#include "tests/reliability/disk/image.h"

#include <fcntl.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "tests/reliability/shim/io_hook.h"

namespace prefixd::storage::reliability {
namespace {

using Rng = std::mt19937_64;

void Put(std::string& content, uint64_t offset, std::string_view bytes) {
  if (bytes.empty()) return;
  if (content.size() < offset + bytes.size()) content.resize(offset + bytes.size());
  content.replace(offset, bytes.size(), bytes);
}

void Apply(std::string& content, const FileChange& change) {
  if (change.resize) {
    content.resize(change.offset);
  } else {
    Put(content, change.offset, change.bytes);
  }
}

// Applies a write that reached the disk in part: some of its sectors (or pages), or a beginning or
// an end.
void PutTorn(std::string& content, const FileChange& change, Rng& rng) {
  const uint64_t unit = rng() % 2 ? 512 : 4096;
  const uint64_t shape = rng() % 3;
  const uint64_t end = change.offset + change.bytes.size();
  const uint64_t cut = change.offset + rng() % (change.bytes.size() + 1);
  for (uint64_t at = change.offset; at < end;) {
    const uint64_t next = std::min(end, (at / unit + 1) * unit);
    const bool survives = shape == 0 ? next <= cut : shape == 1 ? at >= cut : rng() % 2 != 0;
    if (survives) {
      Put(content, at, std::string_view(change.bytes).substr(at - change.offset, next - at));
    }
    at = next;
  }
}

void PutCorrupted(std::string& content, FileChange change, Rng& rng) {
  const size_t at = rng() % change.bytes.size();
  const size_t n = std::min<size_t>(change.bytes.size() - at, 1 + rng() % 600);
  for (size_t i = at; i < at + n; ++i) change.bytes[i] = static_cast<char>(rng());
  Put(content, change.offset, change.bytes);
}

// Returns the bytes of a file after the crash. `keep` is the share, of four, of writes that survive
// whole.
std::string Survivor(const SimFile& file, uint64_t keep, bool torn, Rng& rng) {
  std::string content = file.durable;
  uint64_t size = content.size();
  for (const FileChange& change : file.pending) {
    if (!change.resize) size = std::max<uint64_t>(size, change.offset + change.bytes.size());
    if (rng() % 4 < keep) {
      Apply(content, change);
    } else if (torn && !change.resize && !change.bytes.empty()) {
      const uint64_t dice = rng() % 3;
      if (dice == 1) PutTorn(content, change, rng);
      if (dice == 2) PutCorrupted(content, change, rng);
    }
  }
  // The new size may be on the disk although the bytes are not: they read as zeros.
  if (content.size() < size && rng() % 3 == 0) content.resize(size);
  return content;
}

[[noreturn]] void Die(const std::string& what) {
  std::fprintf(stderr, "simulated disk: cannot write %s\n", what.c_str());
  std::_Exit(79);
}

void WriteWhole(const std::string& path, const std::string& content) {
  const int fd = RealOpen(path.c_str(), O_CREAT | O_WRONLY | O_TRUNC, 0600);
  if (fd < 0) Die(path);
  for (size_t at = 0; at < content.size();) {
    const ssize_t n = RealWrite(fd, content.data() + at, content.size() - at);
    if (n <= 0) Die(path);
    at += static_cast<size_t>(n);
  }
  RealClose(fd);
}

std::string Parent(const std::string& path) { return path.substr(0, path.rfind('/')); }

void Apply(std::map<std::string, std::shared_ptr<SimFile>>& files,
           std::set<std::string>& directories, const NameChange& change) {
  switch (change.kind) {
    case NameChange::Kind::kFile:
      files[change.path] = change.file;
      return;
    case NameChange::Kind::kRename:
      files.erase(change.path);
      files[change.to] = change.file;
      return;
    case NameChange::Kind::kRemove:
      files.erase(change.path);
      directories.erase(change.path);
      return;
    case NameChange::Kind::kMakeDirectory:
      directories.insert(change.path);
      return;
  }
}

}  // namespace

void SimFile::Recluster() {
  for (const FileChange& change : pending) Apply(durable, change);
  pending.clear();
}

void DiskState::Change(NameChange change) {
  std::set<std::string> unused;
  Apply(now_files, unused, change);
  pending.push_back(std::move(change));
}

void DiskState::Recluster(const std::string& directory) {
  std::vector<NameChange> rest;
  for (NameChange& change : pending) {
    if (Parent(change.path) == directory) {
      Apply(files, directories, change);
    } else {
      rest.push_back(std::move(change));
    }
  }
  pending = std::move(rest);
}

void WriteImage(const DiskState& state, const std::string& root, const std::string& image,
                Rng& rng) {
  auto files = state.files;
  auto directories = state.directories;
  // In a store's own directories any of the unsynced name changes may survive. In RocksDB's, those
  // before some moment survive: it relies, as file systems grant, on a rename not overtaking the
  // creation before it in the same directory.
  const uint64_t keep_names = rng() % 5;
  const size_t moment = rng() % (state.pending.size() + 1);
  for (size_t i = 0; i < state.pending.size(); ++i) {
    const NameChange& change = state.pending[i];
    const bool ordered = change.path.find("/catalog/") != std::string::npos;
    if (ordered ? i < moment : rng() % 4 < keep_names) Apply(files, directories, change);
  }
  const auto place = [&](const std::string& path) { return image + path.substr(root.size()); };
  if (RealMkdir(image.c_str(), 0700) != 0) Die(image);
  for (const std::string& directory : directories) {  // parents sort before children
    if (directory != root && !directories.contains(Parent(directory))) continue;
    if (directory != root && RealMkdir(place(directory).c_str(), 0700) != 0) Die(directory);
  }
  const uint64_t keep = rng() % 5;
  const bool torn = rng() % 2 != 0;
  for (const auto& [path, file] : files) {
    if (directories.contains(Parent(path))) {
      WriteWhole(place(path), Survivor(*file, keep, torn, rng));
    }
  }
}

}  // namespace prefixd::storage::reliability
