// Makes listening sockets, as raw descriptors that the server hands to Asio.
#pragma once

#include <sys/types.h>

#include <string>

#include "prefixd/result.h"
#include "protocol/address.h"

namespace prefixd::daemon {

// Owns the descriptor and, for a Unix socket, its file. The destructor removes the file if it is
// still the one that was made here. Move-only.
class Listener {
 public:
  // Replaces a socket file that no daemon answers on; kFailedPrecondition when one answers or when
  // the path is no socket. The file's mode is 0600, or 0660 for `group`, whose name or number is
  // `group_name`; "": that of the process.
  static Result<Listener> Unix(const std::string& path, bool group,
                               const std::string& group_name = "");
  // kFailedPrecondition when the port is in use.
  static Result<Listener> Tcp(const Address& address);

  Listener(Listener&& other) noexcept;
  Listener& operator=(Listener&& other) noexcept;
  ~Listener();

  const Address& address() const { return address_; }  // with the port really bound
  int Release();                                       // gives the descriptor, keeps the file
  void RemoveFile();

 private:
  Listener() = default;

  Address address_;
  int fd_ = -1;
  bool owns_file_ = false;
  dev_t device_ = 0;
  ino_t inode_ = 0;
};

}  // namespace prefixd::daemon
